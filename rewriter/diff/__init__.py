"""Compares two models: are they the same function, and if not, where do they first differ?

entry     prove (``diff``), bisect (the first wrong rewrite), auc, report
running   trial (a model, leaving it unchanged), watch (every value), double (in float64)
judging   judge, shake (is it rounding?), rounding (tables in fewer bits), reordered_units
locating  locate, alongside
"""
