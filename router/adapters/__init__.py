"""Other protocols beside ours on the same port. Each file translates one into calls of the Inference service."""
