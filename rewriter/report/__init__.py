"""What was done, in readable form.

report  journal (what happened), report (as text and JSON), html
graphs  dump (as text, JSON, Python), words (their shortened lists), draw (as a picture)
files   output
"""
