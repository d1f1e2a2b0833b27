"""GPU work that is recorded once and then replayed.

``mode="graph"``      forward, training (with backward), step (of an optimizer)
``TrainingStep``      training_step
recording             recording (one), recordings (several, by the form of the batch)
the batch             batches/ (its form and fixed memory), prefetch
gradients             gradients/ (how they reach the weights, in which memory)
the optimizer         optimizer/ (dense parameters, loss scaling)
checked at each call  state/ (of models, layers, optimizers)
"""
