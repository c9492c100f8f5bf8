"""Adapters: one file a framework, which imports that framework only when it is used."""
