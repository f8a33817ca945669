// Command digits trains the network of many tutorials, 784 inputs, one hidden layer and ten
// classes, over four ranks at ZeRO-3 on images of digits that it draws, and prints the
// accuracy on held-out images after each epoch: go run ./examples/digits
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"math/rand/v2"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/model"
)

// Number of images of an epoch and held out, and the size of the job.
const (
	side, classes   = 28, 10
	images, heldOut = 12800, 1600
	ranks, batch    = 4, 16
)

// glyphs are the digits as 5 by 7 pixels, a row a byte, the leftmost pixel in bit 4.
var glyphs = [classes][7]byte{
	{0x0e, 0x11, 0x13, 0x15, 0x19, 0x11, 0x0e}, {0x04, 0x0c, 0x04, 0x04, 0x04, 0x04, 0x0e},
	{0x0e, 0x11, 0x01, 0x02, 0x04, 0x08, 0x1f}, {0x1f, 0x02, 0x04, 0x02, 0x01, 0x11, 0x0e},
	{0x02, 0x06, 0x0a, 0x12, 0x1f, 0x02, 0x02}, {0x1f, 0x10, 0x1e, 0x01, 0x01, 0x11, 0x0e},
	{0x06, 0x08, 0x10, 0x1e, 0x11, 0x11, 0x0e}, {0x1f, 0x01, 0x02, 0x04, 0x08, 0x08, 0x08},
	{0x0e, 0x11, 0x11, 0x0e, 0x11, 0x11, 0x0e}, {0x0e, 0x11, 0x11, 0x0f, 0x01, 0x02, 0x0c},
}

// ink returns how dark a digit is at x, y in pixels of its glyph, in [0, 1], interpolated between
// the centres of four pixels.
func ink(digit int, x, y float64) float64 {
	column, row := math.Floor(x-0.5), math.Floor(y-0.5)
	sum := 0.0
	for k := range 4 {
		c, r := int(column)+k%2, int(row)+k/2
		if c >= 0 && c < 5 && r >= 0 && r < 7 && glyphs[digit][r]>>(4-c)&1 == 1 {
			sum += (1 - math.Abs(x-0.5-float64(c))) * (1 - math.Abs(y-0.5-float64(r)))
		}
	}
	return sum
}

// digits are images drawn from a seed: a digit that is shifted, rotated, scaled and sheared, with
// noise. An index always has the same image.
type digits struct{ first, n int64 }

func (d digits) Len() int64 { return d.n }

func (d digits) CountTargets(int64) int { return 1 }

func (d digits) Sample(i int64, r *data.Row) error {
	rng := rand.New(rand.NewPCG(uint64(d.first+i), 28))
	uniform := func(most float64) float64 { return most * (2*rng.Float64() - 1) }
	digit, angle, shear, size := rng.IntN(classes), uniform(0.35), uniform(0.2), 2.6*(1+uniform(0.15))
	sin, cos := math.Sincos(angle)
	left, top := side/2+uniform(4), side/2+uniform(4)
	image := r.Input("x")
	for k := range image {
		x, y := float64(k%side)+0.5-left, float64(k/side)+0.5-top
		x, y = (cos*x+sin*y)/size, (cos*y-sin*x)/size
		image[k] = float32(2*ink(digit, x+shear*y+2.5, y+3.5) + 0.3*rng.NormFloat64())
	}
	r.Targets[0] = int32(digit)
	return nil
}

// train trains a network with the given hidden layers for some epochs. After each epoch it reports
// the accuracy on held-out images. It returns the last accuracy and the losses of all steps.
func train(stage, epochs int, hidden []int, tell func(epoch int, e *spillway.EvalResult)) (losses []float32, accuracy float64, err error) {
	c, ctx := spillway.Default(), context.Background()
	c.Own.Model = spillway.NewModel("digits", model.Config{Family: model.MLP, Inputs: side * side, Hidden: hidden, Classes: classes})
	c.Own.Data, c.Own.Eval, c.Order = digits{0, images}, digits{images, heldOut}, "shuffled"
	c.Ranks, c.Zero, c.Batch, c.LR, c.LRSchedule = ranks, stage, batch, 2e-3, "cosine"
	c.EvalEvery, c.EvalSteps = images/(ranks*batch), heldOut/(ranks*batch)
	c.Steps = epochs * c.EvalEvery
	t, err := spillway.New(ctx, c)
	if err != nil {
		return nil, 0, err
	}
	err = t.Run(ctx, func(r spillway.StepResult) error {
		losses = append(losses, r.Loss)
		if r.Eval != nil {
			accuracy = r.Eval.Accuracy
			tell(r.Step/c.EvalEvery, r.Eval)
		}
		return nil
	})
	return losses, accuracy, errors.Join(err, t.Close())
}

func main() {
	_, _, err := train(3, 10, []int{256}, func(epoch int, e *spillway.EvalResult) {
		fmt.Printf("epoch %d: loss %.4f, accuracy %.2f %% of %d held-out images\n", epoch, e.Loss, 100*e.Accuracy, e.Targets)
	})
	if err != nil {
		log.Fatal(err)
	}
}
