"""The optimizer's step of dense parameters, as it is recorded; loss scaling."""
