"""FedATOL: ATOL (Zheng et al., NeurIPS 2023) in local training, with images that a generator makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, softplus

from ..core.fields import setting
from ..core.random import with_seed
from ..core.types import Batch, Context, Nets, Optimiser, Phase, Rng, both_views
from ..functional import outlier_exposure, supcon
from ..nets.generator import ImageDiscriminator, ImageGenerator
from .base import Method, image_shape

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LATENT = 100
SETTLING = 16  # latents behind the first statistics of the generator's batch normalisation
BETAS = (0.5, 0.999)  # of Adam, for generator and discriminator


@final
class LatentImages(nn.Module):
    """A generator of images and the latent mean of each class, M_c ∈ {−mu, +mu}^100: they travel together."""

    means: Tensor

    def __init__(self, shape: tuple[int, int, int], means: Float[Tensor, "classes latent"], width: int) -> None:
        super().__init__()
        self.images = ImageGenerator(shape, latent=means.shape[1], width=width)
        self.register_buffer("means", means)

    def forward(self, latents: Float[Tensor, "n latent"]) -> Float[Tensor, "n c h w"]:
        out: Tensor = self.images(latents)
        return out

    @torch.no_grad()
    def settle(self, latents: Float[Tensor, "n latent"], *, contrast: bool) -> None:
        """Take the statistics of batch normalisation from these latents; with `contrast` make the images vivid.

        Without it an untrained generator in eval mode makes images that are all the same grey. `contrast` scales the
        last layer, so that the values before its tanh have variance 1.
        """
        norms = [layer for layer in self.images.modules() if isinstance(layer, nn.BatchNorm2d)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        before_tanh = self.images.net[:-1].train()(latents[:, :, None, None])
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        last = self.images.net[-2]
        if contrast and isinstance(last, nn.ConvTranspose2d):
            last.weight.div_(before_tanh.std().clamp_min(1e-12))
        self.eval()


@final
@dataclass(frozen=True)
class FedATOL(Method):
    """FedAvg with generated images: auxiliary ones of each class, and outliers that it shall know nothing about.

    Auxiliary images of class y are G(M_y + s·ε), outliers G(u) with u ~ U(−a, a)^100 and a = mu·space/2. The loss is
    CE over real and auxiliary images, with smoothed labels, + lambda_ood·OE(outliers) + lambda_al·SupCon(features of
    real and auxiliary images), and its gradient is clipped. G is in eval mode and never learns from this loss.

    `generator` says where G comes from, and what that costs in privacy:

    - fed_gan: a GAN that the clients train in the first `gan_rounds` rounds and the server averages. Images stay where
      they are, but generator and discriminator learn from them and every client gets both: what a GAN remembers of a
      client's images, all others can see. Both stay in the row that travels, and count there, in later rounds too.
    - random: untrained, from the run's seed. It has seen no image, so it shows none.
    - central: a GAN that the server trains on the images of all clients before round 1, as the authors did. The server
      then has everybody's images. That is possible in a simulation only, or with public data of the same kind.
    """

    views: int = setting(1, "2: losses on the augmented view too", choices=(1, 2))
    generator: str = setting(
        "fed_gan", "where the generator comes from; see privacy", choices=("fed_gan", "random", "central")
    )
    mu: float = setting(5.0, "entries of the latent class means are -mu or mu", gt=0.0)
    s: float = setting(0.1, "standard deviation of latents around a class mean", ge=0.0)
    space: float = setting(4.0, "outlier latents lie within mu*space/2 of 0", gt=0.0)
    aux_id: bool = setting(True, "auxiliary images of the classes of the batch")
    ood_ratio: int = setting(4, "generated outliers an image of the batch", ge=0)
    lambda_ood: float = setting(1.0, "weight of outlier exposure", ge=0.0)
    lambda_al: float = setting(1.0, "weight of the alignment of features", ge=0.0)
    temperature: float = setting(0.07, "of the alignment", gt=0.0)
    smoothing: float = setting(0.5, "of the labels; 0: hard labels", ge=0.0, le=1.0)
    clip: float = setting(1.0, "largest gradient norm of the model; 0: none", ge=0.0)
    bn: str = setting("joint", "real: running statistics of real images only", choices=("joint", "real"))
    generator_width: int = setting(0, "channels of the generator; 0: 64, and fewer for images below 32 pixels", ge=0)
    gan_epochs: int = setting(20, "epochs of the server's GAN (central)", ge=0)
    gan_rounds: int = setting(20, "rounds in which the clients train a GAN (fed_gan)", ge=0)
    gan_lr: float = setting(2e-4, "learning rate of the GAN", gt=0.0)

    paper: ClassVar[str] = "Zheng et al., NeurIPS 2023"
    travels: ClassVar[str] = "the model, an image generator and its discriminator, both ways"
    passes: ClassVar[str] = "five generated images for each real one, in the same pass"

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        model = {"model": ("backbone", "head")}
        if self.generator != "fed_gan":
            return model
        return {**model, "generator": ("generator",), "discriminator": ("discriminator",)}

    @property
    def frozen(self) -> frozenset[str]:
        return frozenset() if self.generator == "fed_gan" else frozenset({"generator"})

    @property
    def pools_data(self) -> bool:
        return self.generator == "central"

    @property
    def effort(self) -> float:
        return float(self.views + self.aux_id + self.outliers)

    @property
    def outliers(self) -> int:
        """Generated outliers for each image of the batch."""
        return self.ood_ratio if self.lambda_ood > 0 else 0

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        nets = super().build(backbone, num_classes, rng)
        shape = image_shape(backbone)
        signs = 2.0 * torch.randint(2, (num_classes, LATENT), generator=rng("class_means")) - 1
        made = with_seed(rng("generator"), lambda: LatentImages(shape, self.mu * signs, self.width(shape)))
        made.settle(self.gan_latents(SETTLING, rng("settling"), signs.device), contrast=self.generator == "random")
        nets["generator"] = made
        if self.generator == "fed_gan":
            nets["discriminator"] = self.discriminator(shape, rng("discriminator"))
        return nets

    def width(self, shape: tuple[int, int, int]) -> int:
        """The channels of the generator's last layers: 64·(side/32)³, but from 4 to 64."""
        return self.generator_width or min(64, max(4, max(shape[1:]) ** 3 // 512))

    def discriminator(self, shape: tuple[int, int, int], stream: torch.Generator) -> ImageDiscriminator:
        """The GAN's other half."""
        return with_seed(stream, lambda: ImageDiscriminator(shape, width=self.width(shape)))

    def gan_latents(self, count: int, stream: torch.Generator, device: torch.device) -> Float[Tensor, "count latent"]:
        """mu·N(0, I): as large as the latents that the method will use, which matters in eval mode only."""
        return self.mu * torch.randn(count, LATENT, generator=stream, device=device)

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        if group == "model":
            return replace(default, clip=self.clip)
        return Optimiser(lr=self.gan_lr, kind="adam", betas=BETAS)

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        model = Phase(("model",), epochs)
        if self.generator == "fed_gan" and round < self.gan_rounds:
            return (Phase(("generator", "discriminator"), epochs), model)
        return (model,)

    @torch.no_grad()
    def extend(self, nets: Nets, batch: Batch, ctx: Context) -> Batch:
        if "model" not in ctx.groups or not (self.aux_id or self.outliers):
            return batch
        generator = _latent_images(nets).eval()
        stream, latents = ctx.rng("atol"), []
        if self.aux_id:
            latents.append(class_latents(generator.means, batch.y, s=self.s, stream=stream))
        if self.outliers:
            bound = 0.5 * self.mu * self.space
            count = self.outliers * len(batch.y)
            latents.append(outlier_latents(count, bound, stream=stream, device=batch.x.device))
        return batch._replace(x_more=(generator(torch.cat(latents)) - ctx.mean) / ctx.std)

    def embed(self, nets: Nets, batch: Batch) -> Batch:
        if self.bn == "joint" or batch.x_more is None:
            return super().embed(nets, batch)
        # A pass of their own for generated images: normalised by their own moments, on copies of the buffers.
        real = super().embed(nets, batch._replace(x_more=None))
        backbone = nets["backbone"]
        copies = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
        return real._replace(x_more=batch.x_more, z_more=functional_call(backbone, copies, (batch.x_more,)))

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        if "model" in ctx.groups:
            return {"model": self.model_loss(nets, both_views(batch))}
        latents = self.gan_latents(len(batch.x), ctx.rng("gan"), batch.x.device)
        images = batch.x * ctx.std + ctx.mean
        return gan_losses(_latent_images(nets), nets["discriminator"], images, latents)

    def model_loss(self, nets: Nets, batch: Batch) -> Tensor:
        """L_id + lambda_ood·L_ood + lambda_al·L_al."""
        head, z, y = nets["head"], batch.features, batch.y
        outliers = None
        if batch.z_more is not None:
            count = len(batch.z_more) // (self.aux_id + self.outliers)  # images of the batch before its second view
            auxiliary, outliers = torch.split(batch.z_more, [count * self.aux_id, count * self.outliers])
            if self.aux_id:
                z, y = torch.cat([z, auxiliary]), torch.cat([y, y[:count]])
        loss = cross_entropy(head(z), y, label_smoothing=self.smoothing)
        if outliers is not None and self.outliers:
            loss = loss + self.lambda_ood * outlier_exposure(head(outliers))
        if self.lambda_al > 0:
            loss = loss + self.lambda_al * supcon(z, y, temperature=self.temperature)
        return loss

    def pretrain(self, nets: Nets, epoch: Callable[[], Iterable[Batch]], ctx: Context) -> None:
        generator = _latent_images(nets).train()
        discriminator = self.discriminator(image_shape(nets["backbone"]), ctx.rng("discriminator")).to(ctx.mean.device)
        players: dict[str, nn.Module] = {"generator": generator, "discriminator": discriminator}
        adams = {name: torch.optim.Adam(net.parameters(), lr=self.gan_lr, betas=BETAS) for name, net in players.items()}
        for _ in range(self.gan_epochs):
            for batch in epoch():
                latents = self.gan_latents(len(batch.x), ctx.rng("gan"), batch.x.device)
                with torch.enable_grad():
                    losses = gan_losses(generator, discriminator, batch.x * ctx.std + ctx.mean, latents)
                for name, loss in losses.items():
                    gradients = torch.autograd.grad(loss, list(players[name].parameters()))
                    for parameter, gradient in zip(players[name].parameters(), gradients, strict=True):
                        parameter.grad = gradient
                for adam in adams.values():
                    adam.step()
                    adam.zero_grad(set_to_none=True)
        generator.eval()


def class_latents(
    means: Float[Tensor, "classes latent"], y: Int[Tensor, " n"], *, s: float, stream: torch.Generator
) -> Float[Tensor, "n latent"]:
    """M_y + s·ε, the latents of auxiliary images."""
    noise = torch.randn(len(y), means.shape[1], generator=stream, device=means.device)
    return means[y] + s * noise


def outlier_latents(
    count: int, bound: float, *, stream: torch.Generator, device: torch.device
) -> Float[Tensor, "count latent"]:
    """Uniform in the cube (−bound, bound)^100, the latents of outliers.

    Those near a class mean are not taken out: with the usual settings the chance of one is about 0.03^100.
    """
    return bound * (2 * torch.rand(count, LATENT, generator=stream, device=device) - 1)


def gan_losses(
    generator: nn.Module, discriminator: nn.Module, real: Float[Tensor, "n c h w"], latents: Float[Tensor, "n latent"]
) -> dict[str, Tensor]:
    """The losses of DCGAN (Radford et al., ICLR 2016) with D(x) = σ(d(x)), each with a gradient for its own net only.

    Generator: −E log D(G(u)); discriminator: −E log D(x) − E log(1 − D(G(u))), for real images x in [0, 1].
    """
    fake = generator(latents)
    fixed = {name: value.detach() for name, value in discriminator.state_dict(keep_vars=True).items()}
    judged: Tensor = functional_call(discriminator, fixed, (fake,))
    return {
        "generator": softplus(-judged).mean(),
        "discriminator": softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean(),
    }


def _latent_images(nets: Nets) -> LatentImages:
    generator = nets["generator"]
    assert isinstance(generator, LatentImages)
    return generator
