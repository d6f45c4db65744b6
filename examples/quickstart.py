"""FedAvg+FOOGD on the embedded data in Python: train, evaluate, and ask a model about images. About two minutes."""

import torch

from foogd import FOOGD, Config, FedAvg, evaluate, simulate
from foogd.detectors.registry import DETECTORS
from foogd.engine.eager import EagerEngine
from foogd.runs.federation import make_federation

config = Config(
    rounds=6, clients=5, alpha=0.5, batch_size=64, lr=0.05, flip=True, corruptions=("brightness",), device="cpu"
)
method = FOOGD(FedAvg())
federation = make_federation(config)
engine = EagerEngine(method, federation, config)

for result in simulate(method, federation, config, engine):
    print(f"round {result.round}: {result.seconds:.1f} s, losses {dict(result.losses)}")

rows = evaluate(engine, result.state, {name: DETECTORS[name] for name in ("msp", "energy", "score_norm")})
for row in rows:
    if row.scope == "weighted" and row.metric in ("accuracy", "auroc") and row.severity in (None, 5):
        print(f"{row.metric:9} {row.split:5} {row.dataset:12} {row.detector or '':10} {100 * row.value:.1f} %")

# The final nets: features, classes and the norm of the score for one batch of OUT images.
nets = engine.nets()
engine.layout.bind(nets, result.state.server.shared, result.state.clients[0].personal)
nets.eval()
images = federation.tests[-1].store.batch(torch.arange(5))
mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (federation.mean, federation.std))
with torch.no_grad():
    z = nets["backbone"]((images - mean) / std)
    print("classes", method.logits(nets, z).argmax(1).tolist())
    print("score norms", method.readout(nets).score(z).norm(dim=1).tolist())
