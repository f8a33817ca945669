// Command library trains GPT-2 on a folder of text, over two ranks at ZeRO-3, and
// continues a prompt: go run ./examples/library gpt2 corpus
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/spillway-ml/spillway"
)

func main() {
	c, ctx, args := spillway.Default(), context.Background(), append(os.Args, "gpt2", "corpus")
	c.Model, c.Data, c.Generate = args[1], args[2], true
	c.Ranks, c.Zero, c.Batch, c.Seq, c.Steps = 2, 3, 2, 64, 20
	t, err := spillway.New(ctx, c)
	if err == nil {
		err = t.Run(ctx, func(r spillway.StepResult) error { fmt.Printf("step %d: loss %.3f\n", r.Step, r.Loss); return nil })
	}
	if err == nil {
		_, err = t.GenerateTo(ctx, "The ", 40, spillway.Sampling{Seed: 1}, func(text string) error { fmt.Print(text); return nil })
	}
	if err != nil {
		log.Fatal(err)
	}
}
