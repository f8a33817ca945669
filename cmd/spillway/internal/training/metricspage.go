package training

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
)

// metricsPage is the HTTP page of --metrics-addr, for Prometheus; nil: there is none.
type metricsPage struct {
	url    string
	server *http.Server
	ended  chan error

	loss, evalLoss, rate, norm, noise, scale, speed, seconds, overlap prometheus.Gauge
	steps, skipped, tokens, sent, diskRead, diskWritten               prometheus.Counter
	peak, classes                                                     *prometheus.GaugeVec
	commSeconds, commBytes, commCalls                                 *prometheus.CounterVec
	commRate                                                          *prometheus.GaugeVec
	skippedBefore                                                     int
}

// serveMetrics starts to serve a run's metrics.
func serveMetrics(t *spillway.Trainer) (*metricsPage, error) {
	addr, err := options.ListenAddress(t.Config().MetricsAddr)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--metrics-addr: %w", err)
	}
	reg := prometheus.NewRegistry()
	p := newMetricsPage(reg, t)
	mux := http.NewServeMux()
	toRun := log.New(&observerLog{warn: t.Config().Warn}, "", 0)
	mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorLog: toRun, MaxRequestsInFlight: observersServed}))
	p.server = &http.Server{Handler: mux, ReadTimeout: observerTimeout, WriteTimeout: observerTimeout, IdleTimeout: observerTimeout, MaxHeaderBytes: 16 << 10, ErrorLog: toRun}
	p.server.SetKeepAlivesEnabled(false) // one request a connection
	p.url = "http://" + l.Addr().String() + "/metrics"
	p.ended = make(chan error, 1)
	go func() {
		defer crash.Guard()
		p.ended <- p.server.Serve(&observers{Listener: l, slots: make(chan struct{}, observerConns), closed: make(chan struct{}), log: toRun})
	}()
	return p, nil
}

func newMetricsPage(reg *prometheus.Registry, t *spillway.Trainer) *metricsPage {
	p := &metricsPage{}
	gauge := func(to *prometheus.Gauge, name, help string) {
		*to = prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "spillway", Name: name, Help: help})
		(*to).Set(math.NaN()) // until the first step
		reg.MustRegister(*to)
	}
	counter := func(to *prometheus.Counter, name, help string) {
		*to = prometheus.NewCounter(prometheus.CounterOpts{Namespace: "spillway", Name: name, Help: help})
		reg.MustRegister(*to)
	}
	counters := func(to **prometheus.CounterVec, name, help string, labels ...string) {
		*to = prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "spillway", Name: name, Help: help}, labels)
		reg.MustRegister(*to)
	}
	gauge(&p.loss, "loss", "Training loss of the last step: the mean over the counted targets of the global batch.")
	gauge(&p.evalLoss, "eval_loss", "Held-out loss of the last evaluation.")
	gauge(&p.rate, "learning_rate", "Learning rate of the last step.")
	gauge(&p.norm, "gradient_norm", "Norm of the last step's gradients before clipping.")
	gauge(&p.noise, "gradient_noise_scale", "Gradient noise scale, in rows, over the newest steps; NaN if it is not known.")
	gauge(&p.scale, "loss_scale", "Loss scale of the last step.")
	gauge(&p.speed, "tokens_per_second", "Tokens a second of the last step, over all ranks.")
	gauge(&p.seconds, "step_seconds", "Wall time of the last step.")
	gauge(&p.overlap, "comm_overlap_ratio", "Share of the last step's communication during which its rank computed.")
	counter(&p.steps, "steps_total", "Completed steps, including those before a resumed run's checkpoint.")
	counter(&p.skipped, "skipped_steps_total", "Steps whose update was left out.")
	counter(&p.tokens, "tokens_total", "Tokens trained on by this process, over all ranks.")
	counter(&p.sent, "comm_sent_bytes_total", "Bytes that all ranks sent, counted as a ring would send them.")
	counter(&p.diskRead, "disk_read_bytes_total", "Bytes that all ranks read from the disk tier.")
	counter(&p.diskWritten, "disk_written_bytes_total", "Bytes that all ranks wrote to the disk tier.")
	p.peak = gauges(reg, "memory_peak_bytes", "Highest byte of a rank's memory that an operation has touched.", "rank", "space")
	p.classes = gauges(reg, "memory_touched_class_bytes", "Touched bytes of the buffers alive at the planned peak, by class: touched by operations, and the host's own buffers up to memory_peak_bytes. Equals memory_planned_class_bytes once all are in use; the classes sum to memory_peak_bytes.", "rank", "space", "class")
	counters(&p.commSeconds, "collective_seconds_total", "Time in a kind of collective, summed over ranks, including the wait for peers.", "op")
	counters(&p.commBytes, "collective_bytes_total", "Whole buffers of a kind of collective, summed over ranks.", "op")
	counters(&p.commCalls, "collective_calls_total", "Runs of a kind of collective, summed over ranks.", "op")
	p.commRate = gauges(reg, "collective_bytes_per_second", "Bytes over seconds of a kind of collective in the last step.", "op")
	p.planned(reg, t)
	p.steps.Add(float64(t.Done()))
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return p
}

// gauges registers a gauge for each set of labels.
func gauges(reg *prometheus.Registry, name, help string, labels ...string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "spillway", Name: name, Help: help}, labels)
	reg.MustRegister(g)
	return g
}

// planned sets the gauges of the plan for each memory space: the peak of a rank, and by class the
// bytes alive at that peak and the peak of the class alone.
func (p *metricsPage) planned(reg *prometheus.Registry, t *spillway.Trainer) {
	peak := gauges(reg, "memory_planned_bytes", "Planned peak of a rank's memory.", "space")
	alive := gauges(reg, "memory_planned_class_bytes", "Bytes alive at the planned peak, by class; the classes sum to the peak.", "space", "class")
	most := gauges(reg, "memory_planned_class_peak_bytes", "Planned peak of a class, which may be at another time than the total's.", "space", "class")
	for sp := range graph.NumSpaces {
		s := t.Plan().Layout.Spaces[sp]
		if s.Peak == 0 {
			continue
		}
		peak.WithLabelValues(sp.String()).Set(float64(s.Peak))
		for class, n := range s.ByClass {
			alive.WithLabelValues(sp.String(), graph.Class(class).String()).Set(float64(n))
		}
		for class, n := range s.ClassPeak {
			most.WithLabelValues(sp.String(), graph.Class(class).String()).Set(float64(n))
		}
	}
}

func (p *metricsPage) step(r spillway.StepResult) {
	if r.Eval != nil {
		p.evalLoss.Set(float64(r.Eval.Loss))
	}
	if r.EvalOnly {
		return
	}
	p.loss.Set(float64(r.Loss))
	p.rate.Set(r.LR)
	p.norm.Set(r.GradNorm)
	p.noise.Set(r.Noise.Scale)
	p.scale.Set(r.LossScale)
	p.speed.Set(r.TokensPerS)
	p.seconds.Set(r.Seconds)
	p.overlap.Set(r.Overlap)
	p.steps.Inc()
	p.skipped.Add(float64(r.SkippedAll - p.skippedBefore))
	p.skippedBefore = r.SkippedAll
	p.tokens.Add(math.Round(r.TokensPerS * r.Seconds))
	p.sent.Add(float64(r.CommBytes))
	p.diskRead.Add(float64(r.DiskRead))
	p.diskWritten.Add(float64(r.DiskWritten))
	for sp := range graph.NumSpaces {
		for rank, n := range r.Peak[sp] {
			if r.Planned[sp][rank] > 0 {
				p.peak.WithLabelValues(strconv.Itoa(rank), sp.String()).Set(float64(n))
				for class, n := range r.Classes[rank][sp] {
					p.classes.WithLabelValues(strconv.Itoa(rank), sp.String(), graph.Class(class).String()).Set(float64(n))
				}
			}
		}
	}
	for _, c := range r.Comm {
		if c.Calls == 0 {
			continue
		}
		p.commSeconds.WithLabelValues(c.Op).Add(c.Seconds)
		p.commBytes.WithLabelValues(c.Op).Add(float64(c.Bytes))
		p.commCalls.WithLabelValues(c.Op).Add(float64(c.Calls))
		p.commRate.WithLabelValues(c.Op).Set(float64(c.Bytes) / c.Seconds)
	}
}

// lastScrape is the time limit for a scrape that is in progress at the end of the run.
const lastScrape = time.Second

func (p *metricsPage) close() error {
	if p == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastScrape)
	defer cancel()
	if p.server.Shutdown(ctx) != nil {
		_ = p.server.Close() // the scrape takes too long
	}
	if err := <-p.ended; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("--metrics-addr: the page was not served to the end: %w", err)
	}
	return nil
}
