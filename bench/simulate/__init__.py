"""A discrete-event simulation of the engine's own scheduler, with a model of the step time."""
