// Command fine-tune trains the last layers of an existing model on text. The weights come from a
// Hugging Face folder. The embedding and the first layers are frozen, and their outputs are cached,
// so that the second epoch does not compute them again.
//
//	go run ./examples/fine-tune MODEL TEXT [CHECKPOINTS]
//
// "spillway ckpt export CHECKPOINTS --to DIR" exports the newest checkpoint as a Hugging Face
// folder.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"slices"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
)

func main() {
	args := append(os.Args[1:], "")
	if len(args) != 3 && len(args) != 4 {
		log.Fatal("usage: fine-tune MODEL TEXT [CHECKPOINTS]")
	}
	if err := run(args[0], args[1], args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(model, text, checkpoints string) (err error) {
	ctx := context.Background()
	c := spillway.Default()
	c.Model, c.Init, c.Data, c.EvalData, c.Checkpoint = model, model, text, text, checkpoints
	c.Freeze = []string{"wte.*", "wpe.*", "h.0.*"} // names as in the folder's weights
	c.FrozenCache = spillway.FrozenCache{Tier: graph.Host, Bytes: 64 << 20}
	c.Batch, c.Seq, c.Steps, c.LR, c.Order = 4, 64, 40, 1e-3, "shuffled"

	t, err := spillway.New(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	const frozen = "h.0.ln_1.weight"
	_, before, err := t.Parameter(frozen)
	if err != nil {
		return err
	}
	held, err := t.Evaluate(ctx)
	if err != nil {
		return err
	}
	cached := 0
	err = t.Run(ctx, func(r spillway.StepResult) error {
		if r.Cached {
			cached++
		}
		if r.Eval != nil {
			fmt.Printf("loss %.4f as it came, %.4f after %d steps; %d steps skipped the frozen layers\n", held.Loss, r.Eval.Loss, r.Step, cached)
		}
		return nil
	})
	if err != nil {
		return err
	}
	_, after, err := t.Parameter(frozen)
	if err == nil && !slices.Equal(before, after) {
		err = fmt.Errorf("%s is frozen and has changed", frozen)
	}
	return err
}
