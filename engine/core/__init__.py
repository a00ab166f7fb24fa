"""What the rooms of the engine pass to each other: sequences (sequence.py), steps (step.py) and errors (errors.py)."""
