"""GPU work that is recorded once, as CUDA graphs, and then replayed.

There are two ways in. ``mode="graph"`` records forward, backward and the optimizer's step
separately and leaves the training loop as it is; ``TrainingStep`` records the whole step as one.

*When is a call recorded, when replayed?* ``recordings``: the first calls with a form of batch run
eagerly, as always; one is recorded; all later ones are replays, as long as the ``state`` of the
model is what it was. A call runs eagerly if something changed (it is then recorded anew) or if a
replay would leave something out (``why_not``).

*What does a replay read?* Always the same memory: the batch is copied to ``batches.static_inputs``,
gradients come out in ``gradients``, parameters and optimizer state stay where they are.

``mode="graph"``      forward, training (when) with forward_backward (what), optimizer_step
``TrainingStep``      training_step
recording             recording (one), recordings (of one job, by the form of the batch), why_not
the batch             batches/ (its form, recognising the next one, its fixed memory), prefetch
gradients             gradients/ (how they reach the weights, in which memory; sorts of ids)
the optimizer         optimizer/ (dense parameters, loss scaling)
checked at each call  state/ (of models, layers, optimizers, torch's settings)
"""
