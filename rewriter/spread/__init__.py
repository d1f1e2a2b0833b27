"""One model over many ranks: its plan, its graphs, its tables.

model    entry
choice   which sharding types a table may have
check    what is refused
reached  which parameters get gradients, to be averaged
stored   tables in fewer bits
diff     ``recast.diff`` of such a model
"""
