"""Calls that every client's tests make, whatever its language: `calls.json` tells what to ask and what comes back."""
