"""`vitrail demo`: a model learns something while you watch."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import DataError


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

        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write into {self.out}: {error.strerror}") from None
        print("A ViT-Femto/4 learns five shapes from pictures it draws itself.")
        model, accuracy = learn_shapes(steps=self.steps, seed=self.seed, tell=print)
        path = self.out / "attention.png"
        picture(model, seed=self.seed).save(path)
        print(f"\n{accuracy:.1%} of 500 new pictures are named rightly.")
        print(f"{path} shows what it saw: patches, where the class token looks, what it says.")
        print("\nNext: `vitrail models` lists every model of the paper; in Python,")
        print('  vitrail.create("ViT-B/16")      a model with fresh weights')
        print('  vitrail.load("ViT-B_16.npz")    one of the authors\' checkpoints')
