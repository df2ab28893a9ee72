"""The engine: state machine, journal and clock; its two faces, its store and its upkeep."""
