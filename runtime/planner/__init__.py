"""The planner: tables x topology x cost model -> Plan.

:func:`plan` lists the options for each table (``options.py``) and what they cost (``cost.py``),
searches (``search.py``), and proves how far from the optimum the result can be (``bound.py``).
"""

from .load import Dense, TableLoad
from .make import plan
from .options import Thresholds

__all__ = ["Dense", "TableLoad", "Thresholds", "plan"]
