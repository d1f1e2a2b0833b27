"""What recordings take for granted, asked again at every call: of models, layers, optimizers."""
