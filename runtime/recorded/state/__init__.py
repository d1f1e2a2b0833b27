"""What recordings take for granted about models, layers and optimizers, checked at every call."""
