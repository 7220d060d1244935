def text(r):
    import json
    return json.dumps({k: r[k] for k in ("verdict","quantities","noise","rows","self_test")}, indent=1)
def page(*a): return ""
