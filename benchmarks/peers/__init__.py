"""Ours against every other way to train the same model on a CPU: ``python benchmarks/peers``.

``cells``        what is measured: a grid of sizes, some with a bar to meet
``model``        the model, its tables and batches
``variants``     the ways to train it: ours, eager, torch.compile, FBGEMM, TorchRec
``contenders``   which variants may be the fastest in a cell
``measure``      the cells of one set of tables, in one process (``rounds``: variants in turns)
``floor``        the least that a step can cost on this machine
``results``      kept as JSON, shown as tables
"""
