"""One model over many ranks: its plan, its graphs, its tables.

model   entry
choice  which sharding types a table may have
check   what is refused
diff    ``recast.diff`` of such a model
"""
