"""What a router tells those who watch it, beside the answers of its own services."""
