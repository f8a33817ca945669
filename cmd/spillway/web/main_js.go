package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"syscall/js"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/planner"
)

// main runs the command line in its first argument. In a worker it first posts the values for the
// form, whose flags the second argument names, and then the answer. Elsewhere it writes to the
// standard streams.
func main() {
	post := js.Global().Get("postMessage")
	words, err := command(os.Args[1])
	if err == nil && post.Truthy() {
		values, rest := fill(words[1:], strings.Fields(os.Args[2]))
		set := map[string]any{}
		for name, value := range values {
			set[name] = value
		}
		post.Invoke(map[string]any{"kind": "form", "values": set, "rest": planner.Shell(rest)})
	}
	var stdout, stderr bytes.Buffer
	var page string
	status := cli.ExitBadInput
	if err != nil {
		fmt.Fprintln(&stderr, "spillway:", err)
	} else {
		status = cli.Execute(context.Background(), root(&page), words, &stdout, &stderr)
	}
	if post.Truthy() {
		post.Invoke(map[string]any{"kind": "answer", "status": status,
			"stdout": stdout.String(), "stderr": stderr.String(), "page": page})
	} else {
		_, _ = stdout.WriteTo(os.Stdout)
		_, _ = stderr.WriteTo(os.Stderr)
	}
	os.Exit(status)
}

// root returns the command with the verbs that work in a browser. It stores the page of a plan in
// page.
func root(page *string) *cobra.Command {
	return cli.Root("Plan models that are larger than one device", planning.Command(nil, func(text []byte) error {
		*page = string(text)
		return nil
	}), cli.VersionCommand())
}
