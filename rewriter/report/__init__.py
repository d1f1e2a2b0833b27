"""What was done, in readable form.

report  journal (what happened), report (as text and JSON), html
graphs  dump (as text, JSON, Python), short_lists (3×x, 0..9), draw (as a picture)
files   output
width   wrap (for a terminal)
"""
