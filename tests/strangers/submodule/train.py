import sys

from loop import fit

sys.path.insert(0, "third_party/shapes")
import shapes

fit(shapes.load(), "out")
