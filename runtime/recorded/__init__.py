"""Work of a GPU, recorded once and replayed: forwards, trainings and whole steps."""
