// Command ledger keeps the loss curves of 16 bits and int8 and judges them: the demo's
// model on the Go sources, 500 steps, three seeds, in fp32, bf16, fp16, bf16 with each
// switch of --int8, and with all of them; and controls, rows with a fault built in,
// which the same bars must refuse.
//
//	go build -o spillway ./cmd/spillway
//	go run ./benchmarks/ledger -spillway ./spillway -runs DIR
//
// DIR keeps each finished run, and what is there already is not run again. Without
// -spillway nothing runs: the finished ones are taken. The losses go to ledger.json and
// ledger.svg, the table to standard output; the exit status is 1 where a bar is not
// held, or a control holds one. Of several processes, each may run rows of its own
// (-only) into one DIR.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

func main() {
	var o options
	flag.StringVar(&o.spillway, "spillway", "", "the command to run; empty: nothing runs")
	flag.StringVar(&o.runs, "runs", "", "folder of finished runs; empty, without -spillway: those of -out/ledger.json are judged again")
	flag.StringVar(&o.only, "only", "", "run these rows (names, comma-separated) and judge nothing")
	flag.StringVar(&o.data, "data", "", "folder of Go sources to train on; empty: GOROOT/src")
	flag.StringVar(&o.eval, "eval-data", "", "folder of the sources held out; empty: GOROOT/test")
	flag.StringVar(&o.out, "out", "benchmarks/ledger", "folder of ledger.json and ledger.svg")
	flag.Parse()
	held, err := run(o, os.Stdout)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "ledger:", err)
		os.Exit(1)
	case !held:
		os.Exit(1)
	}
}

type options struct {
	spillway, runs, only, data, eval, out string
}

// run tells whether every row came out as it must.
func run(o options, w io.Writer) (held bool, err error) {
	var l ledger
	switch {
	case o.runs == "" && (o.spillway != "" || o.only != ""):
		return false, errors.New("-runs is missing: name a folder for the finished runs")
	case o.runs == "":
		l, err = readLedger(filepath.Join(o.out, "ledger.json"))
	case o.only != "" && o.spillway == "":
		return false, errors.New("-spillway is missing: what -only runs")
	default:
		if l, err = measure(o); err == nil && o.only == "" {
			err = l.write(filepath.Join(o.out, "ledger.json"))
		}
	}
	if err != nil || o.only != "" {
		return err == nil, err
	}
	verdicts, err := judge(l)
	if err != nil {
		return false, err
	}
	if err := drawn(filepath.Join(o.out, "ledger.svg"), l); err != nil {
		return false, err
	}
	return printed(w, l, verdicts)
}

// ledger is the losses of all runs.
type ledger struct {
	Steps int     `json:"steps"`
	Runs  []curve `json:"runs"`
}

// curve is the losses of one run, in nats a token.
type curve struct {
	Row   string    `json:"row"`
	Seed  int       `json:"seed"`
	Train []float64 `json:"train"`           // by step
	Held  []float64 `json:"held"`            // held out, every evalEvery steps
	Ended string    `json:"ended,omitempty"` // why it ended before its last step
}

func readLedger(file string) (l ledger, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return l, err
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return l, fmt.Errorf("%s: %w", file, err)
	}
	return l, nil
}

// write puts a run on a line.
func (l ledger) write(file string) error {
	b := fmt.Appendf(nil, "{\"steps\": %d, \"runs\": [\n", l.Steps)
	for i, c := range l.Runs {
		line, err := json.Marshal(c)
		if err != nil {
			return err
		}
		if b = append(b, line...); i+1 < len(l.Runs) {
			b = append(b, ',')
		}
		b = append(b, '\n')
	}
	return os.WriteFile(file, append(b, "]}\n"...), 0o644)
}
