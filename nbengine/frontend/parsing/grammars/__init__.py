"""The families' ways of calling tools as grammars, in llguidance's dialect of Lark."""
