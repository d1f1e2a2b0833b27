"""Long runs on a machine that is there for minutes: groups of items, each in its own process.

``items``      what a group yields: a name, what to run, a limit
``runner``     starts, watches and ends the processes, within a budget
``worker``     runs a group's items, in such a process
``item_log``   the file between the two: a line when an item starts, and when it ends
``progress``   reports as items end, and lets a later call resume
``results``    the record: the machine, all rows as JSON, a readable page
"""
