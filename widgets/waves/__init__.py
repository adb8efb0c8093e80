"""The timelines of engine cores, wave by wave."""
