"""The planner: tables x topology x cost model -> Plan.

:func:`plan` makes options (``options.py``) of what tables cost (``cost.py``), searches
(``search.py``) and proves how far from the best the result can be at the most (``bound.py``).
"""

from .load import Dense, TableLoad
from .make import plan
from .options import Thresholds

__all__ = ["Dense", "TableLoad", "Thresholds", "plan"]
