"""`vitrail demo`: a model learns something while you watch."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Teach a small ViT to tell drawn shapes apart, and look at what it looks at."""

    out: Path = Path("demo")
    """Folder for the pictures; made if it is not there."""
    steps: int = 600
    """Training steps; 600 take about a minute on two cores."""
    seed: int = 0
    """Another number draws other shapes."""

    def run(self) -> None:
        from vitrail.demo import learn_shapes, picture

        if self.steps < 1 or self.seed < 0:
            raise ConfigError(
                f"steps={self.steps} must be 1 or more, and seed={self.seed} 0 or more"
            )
        path = self.out / "attention.png"
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()  # better to know before a minute of training
        except OSError as error:
            raise DataError(f"cannot write into {self.out}: {error.strerror}") from None
        print("A ViT-Femto/4 learns five shapes from pictures it draws itself.")
        model, accuracy = learn_shapes(steps=self.steps, seed=self.seed, tell=print)
        picture(model, seed=self.seed).save(path)
        print(f"\n{accuracy:.1%} of 500 new pictures are named rightly.")
        print(f"{path} shows what it saw: patches, where the class token looks, what it says.")
        print("\nNext: `vitrail models` lists every model of the paper; in Python,")
        print('  vitrail.create("ViT-B/16")      a model with fresh weights')
        print('  vitrail.load("ViT-B_16.npz")    one of the authors\' checkpoints')
