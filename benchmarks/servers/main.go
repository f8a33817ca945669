// Command servers asks a built spillway what it recommends for every preset on usual
// clusters, and holds what a server's ranks take of host memory against what the server
// has. Rows that servers.csv has already are not asked again, so that it may be stopped
// and started; it prints the summary of README.md from all of them.
//
// usage: go run ./benchmarks/servers -binary ./spillway [-rows N] [-patience D]        (at the root of the repository)
package main

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/presets"
)

const file = "benchmarks/servers/servers.csv"

// clusters are servers as people have them.
var clusters = []string{
	"--gpu rtx-4090 --nodes 1 --gpus-per-node 1", "--gpu rtx-3090 --nodes 1 --gpus-per-node 4", "--gpu v100-32 --nodes 1 --gpus-per-node 8",
	"--gpu a100-40 --nodes 2 --gpus-per-node 8", "--gpu a100-80 --nodes 8 --gpus-per-node 8", "--gpu l40s --nodes 1 --gpus-per-node 8",
	"--gpu h100-80 --nodes 1 --gpus-per-node 8", "--gpu h100-80 --nodes 16 --gpus-per-node 8", "--gpu h200-141 --nodes 1 --gpus-per-node 1",
	"--gpu b200-192 --nodes 64 --gpus-per-node 8",
}

// row is what was recommended for a model on a cluster.
type row struct {
	model, cluster string
	flags          string // "": nothing fits
	host, memory   int64  // bytes a server: what its ranks take, with what is outside their arenas, and what it has
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "servers:", err)
		os.Exit(1)
	}
}

func run() error {
	binary := flag.String("binary", "./spillway", "the command to ask")
	most := flag.Int("rows", len(presets.List())*len(clusters), "rows to have at the end")
	patience := flag.Duration("patience", time.Hour, "how long a pair may take; one that takes longer is left for another time")
	flag.Parse()
	rows, err := read()
	if err != nil {
		return err
	}
	known := map[[2]string]bool{}
	for _, r := range rows {
		known[[2]string{r.model, r.cluster}] = true
	}
	for _, job := range jobs()[:*most] {
		if known[job] {
			continue
		}
		r, err := ask(*binary, job[0], job[1], *patience)
		if errors.Is(err, context.DeadlineExceeded) {
			fmt.Fprintf(os.Stderr, "servers: left %s %s: %v\n", job[0], job[1], err)
			continue
		}
		if err != nil {
			return err
		}
		if err := keep(r); err != nil {
			return err
		}
		rows = append(rows, r)
	}
	summary(os.Stdout, rows)
	return nil
}

// jobs are all models on all clusters: first each model on one, so that the beginning
// has all of both.
func jobs() (list [][2]string) {
	for k := range clusters {
		for i, m := range presets.List() {
			list = append(list, [2]string{m.Name, clusters[(i+k)%len(clusters)]})
		}
	}
	return list
}

// ask plans the fastest that fits, a row of at most 4,096 tokens a GPU.
func ask(binary, model, cluster string, patience time.Duration) (r row, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m, err := presets.Lookup(model)
	if err != nil {
		return r, err
	}
	args := append([]string{"plan", "--fit", "--json", "-", "--model", model, "--batch", "1", "--seq", strconv.Itoa(min(m.Config.Positions, 4096))}, strings.Fields(cluster)...)
	out, err := exec.CommandContext(ctx, binary, args...).Output()
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 2 {
		err = nil // what was asked for does not fit
	}
	if err != nil {
		return r, fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	return parse(model, cluster, out)
}

// parse reads what the command says of a job.
func parse(model, cluster string, doc []byte) (r row, err error) {
	var d struct {
		Recommended *struct {
			Flags string
			Plan  struct {
				Host struct {
					Peak    int64 `json:"peak_bytes"`
					Outside int64 `json:"outside_bytes"`
				}
			}
		}
		Server struct {
			Ranks  int64
			Memory int64 `json:"memory_bytes"`
		}
	}
	if err := json.Unmarshal(doc, &d); err != nil {
		return r, fmt.Errorf("%s %s: %w", model, cluster, err)
	}
	r = row{model: model, cluster: cluster, memory: d.Server.Memory}
	if d.Recommended != nil {
		r.flags, r.host = d.Recommended.Flags, d.Server.Ranks*(d.Recommended.Plan.Host.Peak+d.Recommended.Plan.Host.Outside)
	}
	return r, nil
}

func read() (rows []row, err error) {
	f, err := os.Open(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return rowsOf(f)
}

func rowsOf(in io.Reader) (rows []row, err error) {
	records, err := csv.NewReader(in).ReadAll()
	if err != nil {
		return nil, err
	}
	for i, c := range records {
		if len(c) != 5 {
			return nil, fmt.Errorf("%s, line %d: %d fields; 5 are needed", file, i+1, len(c))
		}
		r := row{model: c[0], cluster: c[1], flags: c[2]}
		var e1, e2 error
		r.host, e1 = strconv.ParseInt(c[3], 10, 64)
		r.memory, e2 = strconv.ParseInt(c[4], 10, 64)
		if err := errors.Join(e1, e2); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", file, i+1, err)
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// keep adds a row to the file.
func keep(r row) (err error) {
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := csv.NewWriter(f)
	_ = w.Write([]string{r.model, r.cluster, r.flags, strconv.FormatInt(r.host, 10), strconv.FormatInt(r.memory, 10)})
	w.Flush()
	return w.Error()
}

// within says whether a server's ranks leave the system its part.
func (r *row) within() bool { return r.host <= gpus.ForRanks(r.memory) }

// summary prints a line for each cluster.
func summary(w io.Writer, rows []row) {
	fmt.Fprintln(w, "| cluster | presets asked | fit | take more than 1 GiB of host memory a rank | fullest server | over its server |")
	fmt.Fprintln(w, "| --- | --- | --- | --- | --- | --- |")
	for _, cluster := range clusters {
		asked, fit, host, over := 0, 0, 0, 0
		fullest, of := 0.0, "–"
		per, _ := strconv.ParseInt(cluster[strings.LastIndexByte(cluster, ' ')+1:], 10, 64)
		for i := range rows {
			r := &rows[i]
			if r.cluster != cluster {
				continue
			}
			asked++
			if r.flags == "" {
				continue
			}
			fit++
			if r.host > per<<30 {
				host++
			}
			if !r.within() {
				over++
			}
			if part := float64(r.host) / float64(r.memory); part > fullest {
				fullest, of = part, fmt.Sprintf("%s: %.0f of %.0f GB", r.model, float64(r.host)/1e9, float64(r.memory)/1e9)
			}
		}
		fmt.Fprintf(w, "| `%s` | %d | %d | %d | %s | %d |\n", cluster, asked, fit, host, of, over)
	}
}
