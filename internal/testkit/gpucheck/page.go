package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

const (
	passed       = "passed"
	failedStatus = "FAILED"
	skipped      = "skipped"
)

// document is the contents of results.json.
type document struct {
	Started  string    `json:"started"`
	Finished string    `json:"finished,omitempty"`
	Device   string    `json:"device"`
	Quick    bool      `json:"quick,omitempty"` // tiny models: figures mean nothing
	Missing  string    `json:"missing,omitempty"`
	Machine  []fact    `json:"machine,omitempty"`
	Parts    []*result `json:"parts,omitempty"`
}

// fact is a property of the machine.
type fact struct{ Name, Value string }

// result is the outcome of a part.
type result struct {
	Name    string     `json:"name"`
	Title   string     `json:"title"`
	Status  string     `json:"status"`
	Seconds float64    `json:"seconds"`
	Lines   []string   `json:"lines,omitempty"` // what a person should read
	Table   [][]string `json:"table,omitempty"` // the first row is the head
	Data    any        `json:"data,omitempty"`
}

func (r *result) say(format string, args ...any) {
	r.Lines = append(r.Lines, fmt.Sprintf(format, args...))
}

func (r *result) fail(format string, args ...any) {
	r.Status = failedStatus
	r.say(format, args...)
}

func (r *result) skip(format string, args ...any) {
	if r.Status != failedStatus {
		r.Status = skipped
	}
	r.say(format, args...)
}

// write writes results.json and results.md.
func (d *document) write(dir string) error {
	j, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "results.json"), append(j, '\n'), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "results.md"), []byte(d.markdown()), 0o644)
}

// briefRunes is the number of characters of the results that are printed at the end.
const briefRunes = 12_000

// brief returns the page and the ends of logs that explain failures, cut to n runes, for a person
// who has only the program's output.
func (d *document) brief(dir string, n int) string {
	page := d.markdown()
	var tails strings.Builder
	for _, r := range d.Parts {
		for _, l := range r.Lines {
			for _, m := range logNames.FindAllStringSubmatch(l, -1) {
				text, err := os.ReadFile(filepath.Join(dir, "logs", m[1]))
				if err != nil {
					continue // the page names it all the same
				}
				lines := strings.Split(strings.TrimSpace(string(text)), "\n")
				fmt.Fprintf(&tails, "\n-- end of logs/%s\n%s\n", m[1], shorten(strings.Join(lines[max(0, len(lines)-12):], "\n"), 900))
			}
		}
	}
	end := shorten(tails.String(), n/3)
	return shorten(page, n-len([]rune(end))-len(cutMark)) + end
}

var logNames = regexp.MustCompile(`logs/([\w.-]+\.txt)`)

func (d *document) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Spillway on a GPU\n\nStarted %s", d.Started)
	if d.Finished != "" {
		fmt.Fprintf(&b, ", finished %s", d.Finished)
	}
	b.WriteString(".\n\n")
	if d.Device != "cuda" || d.Quick {
		fmt.Fprintf(&b, "**A trial of this program on --device %s with tiny models: the figures mean nothing.**\n\n", d.Device)
	}
	if d.Missing != "" {
		fmt.Fprintf(&b, "Nothing was run: %s\n", d.Missing)
		return b.String()
	}
	for _, f := range d.Machine {
		fmt.Fprintf(&b, "- %s: %s\n", f.Name, f.Value)
	}
	if len(d.Parts) > 0 {
		b.WriteString("\n| part | | seconds |\n| --- | --- | --- |\n")
		for _, r := range d.Parts {
			fmt.Fprintf(&b, "| %s | %s | %.0f |\n", r.Title, r.Status, r.Seconds)
		}
	}
	for _, r := range d.Parts {
		fmt.Fprintf(&b, "\n## %s\n\n", r.Title)
		for _, l := range r.Lines {
			fmt.Fprintf(&b, "- %s\n", l)
		}
		for i, row := range r.Table {
			if i == 0 {
				b.WriteString("\n")
			}
			b.WriteString("| " + strings.Join(row, " | ") + " |\n")
			if i == 0 {
				b.WriteString("|" + strings.Repeat(" --- |", len(row)) + "\n")
			}
		}
	}
	return b.String()
}
