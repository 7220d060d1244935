raise RuntimeError("planted at import")
