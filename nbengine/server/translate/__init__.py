"""Pure functions between the bodies of an API and what the engine takes and gives."""
