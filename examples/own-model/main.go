// Command own-model trains a model, an operation and an optimizer that the program itself defines,
// on data that it generates. It runs over two ranks, once replicated and once sharded (ZeRO-3). The
// losses are the same bits.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

const side, classes = 12, 4

// stripes are images of noisy stripes: horizontal, vertical, and along both diagonals. Every tenth
// has no label.
type stripes struct{ first, n int64 }

func (s stripes) Len() int64 { return s.n }

func (s stripes) Sample(i int64, r *data.Row) error {
	rng := rand.New(rand.NewPCG(uint64(s.first+i), 1))
	class, phase := rng.IntN(classes), rng.Float64()*2*math.Pi
	image := r.Input("image")
	for k := range image {
		along := [classes]int{k / side, k % side, k/side + k%side, k/side - k%side}[class]
		image[k] = float32(math.Sin(1.6*float64(along)+phase) + 0.5*rng.NormFloat64())
	}
	if i%10 != 9 {
		r.Targets[0] = int32(class) // without a label the target stays -1, and does not count
	}
	return nil
}

// leakyAttr is the attribute of the operation y = x, or Slope·x if x is negative.
type leakyAttr struct{ Slope float64 }

func sameShape(_ any, in [][]int64) ([][]int64, error) { return in[:1], nil }
func flops(_ any, in, _ [][]int64) int64               { return 2 * in[0][0] * in[0][1] * in[0][2] * in[0][3] }

// leakyKernel computes the operation, and with dy as a second input its derivative.
func leakyKernel(c *graph.Call) error {
	for i := range int(c.In[0].Elems()) {
		slope := 1.0
		if c.In[0].At(i) < 0 {
			slope = c.Attr.(leakyAttr).Slope
		}
		c.Out[0].Put(i, slope*c.In[len(c.In)-1].At(i))
	}
	return nil
}

var leakyGrad = graph.MustDefine(graph.Definition{
	Kind: "leaky_grad", Doc: "dx = dy, or Slope·dy where x is negative", Attr: leakyAttr{},
	In: []graph.Operand{graph.FloatIn("x"), graph.FloatIn("dy")}, Out: []graph.Operand{graph.GradOut("dx")},
	Shapes: sameShape, Flops: flops, CPU: leakyKernel, Reference: leakyKernel,
})

var leaky = graph.MustDefine(graph.Definition{
	Kind: "leaky", Doc: "y = x, or Slope·x where x is negative", Derivative: "dx = dy, or Slope·dy", Attr: leakyAttr{},
	In: []graph.Operand{graph.FloatIn("x")}, Out: []graph.Operand{graph.FloatOut("y")}, Saves: []string{"x"}, Cheap: true,
	Shapes: sameShape, Flops: flops, CPU: leakyKernel, Reference: leakyKernel,
	Derive: func(d *graph.Derivation) {
		d.Apply(leakyGrad, "d", d.Attr(), []graph.BufID{d.In(0), d.Grad(0)}, 0)
	},
})

// lionStep updates parameters by the sign of a mean of gradients (Chen et al., Symbolic Discovery
// of Optimization Algorithms, 2023).
var lionStep = graph.MustDefine(graph.Definition{
	Kind: "lion", Doc: "p −= lr·(sign(Beta1·m + (1−Beta1)·g) + Decay·p); m = Beta2·m + (1−Beta2)·g", Attr: graph.UpdateAttr{},
	In: graph.UpdateIn(), Out: []graph.Operand{graph.StateOut("p"), graph.StateOut("m")},
	CPU: func(c *graph.Call) error {
		a, coef, lr := c.Attr.(graph.UpdateAttr), float64(c.In[1].F32[0]), c.In[2].F64[graph.HyperLR]
		p, m := c.Out[0].F32, c.Out[1].F32
		for _, r := range c.Params { // the shard's parts of parameters
			for i := r.Lo; i < r.Hi; i++ {
				g, mean := coef*float64(c.In[0].F32[i]), float64(m[i])
				step := math.Copysign(1, a.Beta1*mean+(1-a.Beta1)*g)
				if r.Decay {
					step += a.Decay * float64(p[i])
				}
				p[i] -= float32(lr * step)
				m[i] = float32(a.Beta2*mean + (1-a.Beta2)*g)
			}
		}
		return nil
	},
})

var lion = &zero.Rule{Name: "lion", States: []string{"mean"}, Emit: func(e *zero.Emitter, t *zero.Target) {
	e.ApplyOwn(t, lionStep, e.Scalars(t), zero.InPlace(t.Value, t.States[0]))
}}

// forward writes two convolutions and a linear layer. Each is a unit, which is sharded and gathered
// separately.
func forward(b *graph.Builder, rows, _ int, _ bool) error {
	x, n := b.Input("image", int64(rows), side, side, 1), int64(rows)
	for i, channels := range []int64{6, 12} {
		b.Block("conv", i)
		name, fan := fmt.Sprintf("conv.%d", i), 9*b.Shape(x)[3]
		w := b.Param(name+".weight", graph.Normal(math.Sqrt(2/float64(fan))), channels, fan)
		x = b.Conv2D(name, x, w, b.Param(name+".bias", graph.Zeros, channels), graph.ConvAttr{KH: 3, KW: 3, Stride: 1, Pad: 1})
		x = b.Apply(leaky, name+".leaky", leakyAttr{0.1}, x)[0]
		x = b.MaxPool(name+".pool", x, graph.ConvAttr{KH: 2, KW: 2, Stride: 2})
	}
	b.Unit("head")
	x = b.Linear("head", b.Reshape("flat", x, n, 9*12), b.Param("head.weight", graph.Normal(0.1), classes, 9*12), graph.Value{}, graph.LinearAttr{TransW: true})
	b.CrossEntropy("loss", x, b.Targets(n, 1))
	return b.Err()
}

func train(stage int) (losses []float32) {
	c := spillway.Default()
	c.Own.Model, c.Own.Data, c.Own.Eval = &spillway.Model{Name: "stripes", Forward: forward}, stripes{0, 2000}, stripes{2000, 200}
	c.Own.Rule, c.Own.Schedule = lion, func(step int) float64 { return 0.003 / (1 + float64(step)/20) }
	c.Ranks, c.Zero, c.Batch, c.Steps, c.Order = 2, stage, 16, 60, "shuffled"
	t, err := spillway.New(context.Background(), c)
	if err != nil {
		log.Fatal(err)
	}
	err = t.Run(context.Background(), func(r spillway.StepResult) error {
		losses = append(losses, r.Loss)
		if r.Eval != nil {
			fmt.Printf("ZeRO-%d: loss %.4f at first, %.4f after %d steps, %.4f held out\n", stage, losses[0], r.Loss, r.Step, r.Eval.Loss)
		}
		return nil
	})
	if err = errors.Join(err, t.Close()); err != nil {
		log.Fatal(err)
	}
	return losses
}

func main() {
	replicated, sharded := train(0), train(3)
	if !slices.Equal(replicated, sharded) || !(sharded[len(sharded)-1] < sharded[0]/4) {
		log.Fatalf("losses differ, or did not fall: %v and %v", replicated, sharded)
	}
	fmt.Println("the same bits")
}
