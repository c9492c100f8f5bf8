"""Adapters: one public module a framework, which imports that framework only when it is used."""
