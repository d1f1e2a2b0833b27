"""Work of a GPU, recorded once and replayed: forwards, trainings and whole steps.

:mod:`.recording` makes one, :mod:`.recordings` keeps them by the form of the batch;
:mod:`.forward`, :mod:`.training` and :mod:`.step` are ``mode="graph"``, :mod:`.training_step` is
``TrainingStep``.
"""
