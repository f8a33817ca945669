package model

import (
	"cmp"
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// Classifiers.
const (
	MLP Family = "mlp" // of vectors
	CNN Family = "cnn" // of images: 3×3 convolutions and max-pooling
)

var mlpArch = Arch{
	Family: MLP, Classifier: true, defaults: relu, forward: (*writer).mlp,
	check: func(c Config) error {
		sizes := []size{{"Classes", c.Classes, maxSize}, {"Inputs", c.Inputs, maxSize}}
		return checkSizes(append(sizes, c.hiddenSizes(maxSize)...))
	},
}

var cnnArch = Arch{
	Family: CNN, Classifier: true, defaults: relu, forward: (*writer).cnn,
	check: func(c Config) error {
		if n := len(c.Hidden); n > 0 && (c.Height>>n < 1 || c.ImgWidth>>n < 1) {
			return fmt.Errorf("model: Hidden has %d convolutions, whose pooling halves an image of (%d, %d) to nothing", n, c.Height, c.ImgWidth)
		}
		const most = 1 << 16
		sizes := []size{{"Classes", c.Classes, maxSize}, {"Height", c.Height, most}, {"ImgWidth", c.ImgWidth, most}, {"Chans", c.Chans, most}}
		return checkSizes(append(sizes, c.hiddenSizes(most)...))
	},
}

func relu(c *Config) { c.Act = cmp.Or(c.Act, graph.ActReLU) }

func (c Config) hiddenSizes(most int) (sizes []size) {
	for i, h := range c.Hidden {
		sizes = append(sizes, size{fmt.Sprintf("Hidden[%d]", i), h, most})
	}
	return sizes
}

// mlp writes a classifier of vectors x (B, Inputs): linear layers with an
// activation between them, and cross-entropy. Layer i has weight "layer.i.weight"
// (out, in) and a bias.
func (w *writer) mlp() {
	x := w.Input("x", w.batch, int64(w.c.Inputs))
	for i, n := range w.c.Hidden {
		x = w.dense(i, x, int64(n))
		x = w.Activation(fmt.Sprintf("layer.%d.act", i), x, w.c.Act)
	}
	w.classify(len(w.c.Hidden), x)
}

// cnn writes a classifier of images x (B, Height, ImgWidth, Chans): 3×3
// convolutions that keep the size, each followed by an activation and 2×2
// max-pooling, and one linear layer. A convolution's weight is (O, 3·3·C),
// window elements in order (row, column, channel).
func (w *writer) cnn() {
	c := w.c
	x := w.Input("x", w.batch, int64(c.Height), int64(c.ImgWidth), int64(c.Chans))
	for i, n := range c.Hidden {
		name := fmt.Sprintf("layer.%d", i)
		w.Block("layer", i)
		fan := 9 * w.last(x)
		weight := w.Param(name+".weight", graph.Normal(math.Sqrt(2/float64(fan))), int64(n), fan)
		bias := w.Param(name+".bias", graph.Zeros, int64(n))
		x = w.Conv2D(name, x, weight, bias, graph.ConvAttr{KH: 3, KW: 3, Stride: 1, Pad: 1})
		x = w.Activation(name+".act", x, c.Act)
		x = w.MaxPool(name+".pool", x, graph.ConvAttr{KH: 2, KW: 2, Stride: 2})
	}
	n := int64(1)
	for _, s := range w.Shape(x) {
		n *= s
	}
	w.classify(len(c.Hidden), w.Reshape("flat", x, w.batch, n/w.batch))
}

// classify ends a classifier with the linear layer i and the loss.
func (w *writer) classify(i int, x graph.Value) {
	w.CrossEntropy("loss", w.dense(i, x, int64(w.c.Classes)), w.Targets(w.batch, 1))
}

func (w *writer) dense(i int, x graph.Value, out int64) graph.Value {
	name := fmt.Sprintf("layer.%d", i)
	w.Block("layer", i)
	fan := w.last(x)
	weight := w.Param(name+".weight", graph.Normal(math.Sqrt(2/float64(fan))), out, fan)
	return w.Linear(name, x, weight, w.Param(name+".bias", graph.Zeros, out), graph.LinearAttr{TransW: true})
}

// last returns the last dimension of x; 1 if an earlier call failed.
func (w *writer) last(x graph.Value) int64 {
	s := w.Shape(x)
	if len(s) == 0 {
		return 1
	}
	return s[len(s)-1]
}
