"""What each engine core did over time, wave by wave."""
