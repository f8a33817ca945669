// Command answers prepares a first fine-tuning: a base model, trained on stories that the command
// writes, and conversations for fine-tuning.
//
//	go run ./examples/answers [-steps N] [-pairs N] [-questions N] [-seed N] [FOLDER]
//
// FOLDER, by default world, gets
//
//	shape            the base model's config.json
//	stories.txt      who has what where, with questions and answers
//	base             a Llama in bytes that continues stories, and does not stop
//	pairs.jsonl      a prompt and a response on each line, for spillway finetune
//	questions.jsonl  prompts about scenes that are in none of these, for spillway eval
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/spillway-ml/spillway"
)

// shape is the base model. Its 257 tokens are the bytes and an end token, which stories do not
// have.
const shape = `{"model_type": "llama", "vocab_size": 257, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
 "num_attention_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": true, "initializer_range": 0.1}
`

// amounts are the sizes of the generated data and of the training.
type amounts struct {
	stories, steps, pairs, questions int
	seed                             uint64
}

// standard are the tutorial's amounts.
var standard = amounts{stories: 4000, steps: 1500, pairs: 1000, questions: 10, seed: 1}

func main() {
	log.SetFlags(0)
	a := standard
	flag.IntVar(&a.stories, "stories", a.stories, "stories to train the base model on")
	flag.IntVar(&a.steps, "steps", a.steps, "steps of the base model")
	flag.IntVar(&a.pairs, "pairs", a.pairs, "prompts with responses")
	flag.IntVar(&a.questions, "questions", a.questions, "how many prompts to write that are in no story and no pair")
	flag.Uint64Var(&a.seed, "seed", a.seed, "seed of the questions")
	flag.Parse()
	folder := "world"
	if flag.NArg() > 0 {
		folder = flag.Arg(0)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := build(ctx, folder, a); err != nil {
		log.Fatal("answers: ", err)
	}
}

// The parts of scenes. Within a list each word begins with another letter.
var (
	names   = strings.Fields("Ann Bob Cid Dan Eve Fay Gus Hal Ida Jim Kit Lea")
	colours = strings.Fields("black green pink red tan violet white yellow")
	things  = strings.Fields("bag cup fan hat jar key lid map pen rug toy vase")
	places  = strings.Fields("attic bus cellar garden hall kitchen office park")
)

// A scene is a person who has a thing of a colour at a place.
type scene struct{ name, colour, thing, place string }

func drawScene(r *rand.Rand) scene {
	of := func(list []string) string { return list[r.IntN(len(list))] }
	return scene{of(names), of(colours), of(things), of(places)}
}

func (s scene) String() string {
	return fmt.Sprintf("%s has a %s %s in the %s.", s.name, s.colour, s.thing, s.place)
}

// ask returns one of the questions about the scene, with its answer.
func (s scene) ask(i int) (question, answer string) {
	switch i {
	case 0:
		return "Who has it?", s.name + " has it."
	case 1:
		return "What colour is it?", "It is " + s.colour + "."
	}
	return "Where is it?", "It is in the " + s.place + "."
}

// questions is the number of questions in ask.
const questions = 3

// story returns the scene's text with two of the questions.
func (s scene) story(r *rand.Rand) string {
	text := s.String()
	for _, i := range r.Perm(questions)[:2] {
		q, a := s.ask(i)
		text += " " + q + " " + a
	}
	return text + "\n"
}

// pair is a line of a file of conversations.
type pair struct {
	Prompt   string `json:"prompt"`
	Response string `json:"response"`
}

func (s scene) pair(i int) pair {
	q, a := s.ask(i)
	return pair{fmt.Sprint(s, " ", q), a}
}

// write writes stories and conversations. No question is about a scene of a story or a pair.
func write(folder string, a amounts) error {
	r := rand.New(rand.NewPCG(0, 0))
	seen := map[scene]bool{}
	draw := func() scene {
		s := drawScene(r)
		seen[s] = true
		return s
	}
	var stories strings.Builder
	for range a.stories {
		stories.WriteString(draw().story(r))
	}
	var pairs, asked []pair
	for range a.pairs {
		pairs = append(pairs, draw().pair(r.IntN(questions)))
	}
	for r := rand.New(rand.NewPCG(a.seed, 1)); len(asked) < a.questions; {
		if s := drawScene(r); !seen[s] {
			asked = append(asked, s.pair(r.IntN(questions)))
		}
	}
	files := map[string]string{"shape/config.json": shape, "stories.txt": stories.String()}
	for name, list := range map[string][]pair{"pairs.jsonl": pairs, "questions.jsonl": asked} {
		var text strings.Builder
		lines := json.NewEncoder(&text)
		for _, p := range list {
			if err := lines.Encode(p); err != nil {
				return err
			}
		}
		files[name] = text.String()
	}
	err := os.MkdirAll(filepath.Join(folder, "shape"), 0o755)
	for name, text := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644))
	}
	return err
}

// build creates the folder, and trains the base model.
func build(ctx context.Context, folder string, a amounts) (err error) {
	if err := os.Mkdir(folder, 0o755); err != nil {
		return fmt.Errorf("%w; remove it, or name another folder", err)
	}
	if err := write(folder, a); err != nil {
		return err
	}
	c := spillway.Default()
	c.Model, c.Data, c.Checkpoint = filepath.Join(folder, "shape"), filepath.Join(folder, "stories.txt"), filepath.Join(folder, "base")
	c.Order, c.Batch, c.Seq, c.Steps, c.Clip = "shuffled", 16, 256, a.steps, 1
	c.LR, c.LRSchedule, c.Warmup = 3e-3, "cosine", min(100, a.steps)
	t, err := spillway.New(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	began := time.Now()
	err = t.Run(ctx, func(r spillway.StepResult) error {
		if r.Step%100 == 0 || r.Step == a.steps {
			fmt.Printf("step %d of %d, loss %.3f, %.0f s\n", r.Step, a.steps, r.Loss, time.Since(began).Seconds())
		}
		return nil
	})
	if err == nil {
		fmt.Printf("%s has a base model, %d pairs to fine-tune it on and %d questions\n", folder, a.pairs, a.questions)
	}
	return err
}
