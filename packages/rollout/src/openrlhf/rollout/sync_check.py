class SyncError(RuntimeError): ...


def check_sequences(v, rows=4, n=16):
    return [[(7 * r + 3 * i + 1) % v for i in range(n)] for r in range(rows)]


def compare(a, b, tolerance, engine):
    d = [abs(x - y) for r, s in zip(a, b) for x, y in zip(r[1:], s[1:])]
    m = sum(d) / len(d)
    if not m <= tolerance:
        raise SyncError(f"{engine}: sync error {m}")
    return m
