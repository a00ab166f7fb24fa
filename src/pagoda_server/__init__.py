"""Pagoda's server: the folders of the repository under one import name."""
