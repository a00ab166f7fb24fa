"""Tenants: whose a call is (`Identities`, `caller`), what it may do and see, and what its quotas leave it."""
