"""The forms that forwards of real models take, each as small as it can be.

``FORMS[name]`` is ``(make, batch)``: a model, and its arguments for a number of rows.
"""

from __future__ import annotations

import forms_inside  # noqa: F401  registers its forms, as does the next
from form_kit import FORMS
from forms_around import Interaction

__all__ = ["FORMS", "Interaction"]
