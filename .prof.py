import time, sys
from ema_agent import steward as S, backing as B, gates as G
T=[]
def wrap(cls,name):
    f=getattr(cls,name)
    def g(*a,**k):
        t=time.monotonic()
        try: return f(*a,**k)
        finally: T.append((name,t,time.monotonic()))
    setattr(cls,name,g)
for c,n in ((S.Steward,'_start_moves'),(S.Steward,'_to_twin'),(B.Backing,'take'),(B.Backing,'to_twin'),(G.Gates,'open'),(G.Gates,'close'),(S.Steward,'state'),(S.Steward,'_arrived')):
    wrap(c,n)
import ema_driver.sim.session as D
for n in('unmap','release','map'): wrap(D.SimDriver,n)
orig=S.Steward._record
def rec(self,move,chunks,secs,*,clean):
    now=time.monotonic(); decided=[t for n,t,b in T if n=='_start_moves'][-1] if T else now
    if len(chunks)<50: return orig(self,move,chunks,secs,clean=clean)
    sys.stderr.write(f"--- record {len(chunks)} {1e3*secs:.2f} now {1e3*(now-decided):.2f}\n")
    for n,a,b in T:
        if a>=decided-0.004: sys.stderr.write(f"   {n:14} at {1e3*(a-decided):6.2f} took {1e3*(b-a):6.2f}\n")
    T.clear()
    return orig(self,move,chunks,secs,clean=clean)
S.Steward._record=rec
from ema_cli.main import run
run()
