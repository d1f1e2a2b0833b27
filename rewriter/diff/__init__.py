"""Compares two models: are they the same function, and if not, where do they first differ?

entry     equivalence (``diff``), bisect (the first wrong rewrite), auc, report
running   trials (both and the judge), model_runs (one, left unchanged), call_effects (what a call
          does besides computing numbers), watch (every value), double (in float64)
judging   judge, rounding_noise (is it rounding?), rounding (tables in fewer bits), reordered_units
locating  locate, side_by_side
"""
