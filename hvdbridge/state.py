class StateStore:
    def __init__(self, policy, params): self.state=policy.init(params)
    def part(self, layout):
        def sel(s):
            if all(hasattr(v,'dtype') for v in s.values()): return {n:s[n] for n in layout.names if n in s}
            return {k:sel(v) for k,v in s.items()}
        return sel(self.state)
    def merge(self, layout, new, update):
        def put(old,new):
            for k,v in new.items():
                if v is None: continue
                if hasattr(v,'dtype'): old[k]=v
                else: put(old[k],v)
        put(self.state,new)
    def portable(self): return self.state
    def load(self, *a): pass
    def rescale(self,f): pass
