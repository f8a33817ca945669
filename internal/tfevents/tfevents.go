// Package tfevents writes scalars as the event files that TensorBoard reads: records of
// TensorFlow's TFRecord format, each an Event message (tensorflow/core/util/event.proto) in
// protobuf's wire format. It supports only the fields that scalars need.
package tfevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Fields of Event, Summary, Summary.Value and SessionLog.
const (
	eventWallTime    = 1 // double, seconds
	eventStep        = 2 // int64
	eventFileVersion = 3 // string
	eventSummary     = 5
	eventSessionLog  = 7
	summaryValue     = 1
	valueTag         = 1 // string
	valueSimple      = 2 // float
	sessionStatus    = 1
	sessionStart     = 1 // a value of sessionStatus
)

const version = "brain.Event:2"

// Scalar is a value of one curve at one step.
type Scalar struct {
	Tag   string // TensorBoard groups curves by the part before a slash
	Value float64
}

// Writer appends events to its own file.
type Writer struct {
	f   *os.File
	end int64 // end of the last complete record
	now func() time.Time
	buf []byte
}

// Create makes the folder, if it is missing, and a new event file in it, named as TensorBoard
// expects. Other files in the folder stay. For a run that resumes after step done, TensorBoard
// then ignores later steps in earlier files; −1 means a new run.
func Create(dir string, done int64) (*Writer, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	w := &Writer{now: time.Now}
	for i := 0; w.f == nil; i++ {
		name := fmt.Sprintf("events.out.tfevents.%010d.%s.%d.%d", w.now().Unix(), host, os.Getpid(), i)
		w.f, err = os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
		if err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
	}
	err = w.write(protowire.AppendString(protowire.AppendTag(w.event(), eventFileVersion, protowire.BytesType), version))
	if err == nil && done >= 0 {
		status := protowire.AppendVarint(protowire.AppendTag(nil, sessionStatus, protowire.VarintType), sessionStart)
		e := protowire.AppendVarint(protowire.AppendTag(w.event(), eventStep, protowire.VarintType), uint64(done+1))
		err = w.write(protowire.AppendBytes(protowire.AppendTag(e, eventSessionLog, protowire.BytesType), status))
	}
	if err != nil {
		return nil, errors.Join(err, w.f.Close())
	}
	return w, nil
}

// event starts an encoded Event.
func (w *Writer) event() []byte {
	seconds := float64(w.now().UnixNano()) / 1e9
	return protowire.AppendFixed64(protowire.AppendTag(nil, eventWallTime, protowire.Fixed64Type), math.Float64bits(seconds))
}

// Scalars writes the values of a step.
func (w *Writer) Scalars(step int64, values ...Scalar) error {
	var summary []byte
	for _, s := range values {
		v := protowire.AppendString(protowire.AppendTag(nil, valueTag, protowire.BytesType), s.Tag)
		v = protowire.AppendFixed32(protowire.AppendTag(v, valueSimple, protowire.Fixed32Type), math.Float32bits(float32(s.Value)))
		summary = protowire.AppendBytes(protowire.AppendTag(summary, summaryValue, protowire.BytesType), v)
	}
	e := protowire.AppendVarint(protowire.AppendTag(w.event(), eventStep, protowire.VarintType), uint64(step))
	return w.write(protowire.AppendBytes(protowire.AppendTag(e, eventSummary, protowire.BytesType), summary))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// mask returns TFRecord's masked CRC-32C. The mask keeps checksums strong if the data itself
// contains checksums.
func mask(data []byte) uint32 {
	c := crc32.Checksum(data, castagnoli)
	return (c>>15 | c<<17) + 0xa282ead8
}

// write appends a record: length, its checksum, data, its checksum. A record that can't be
// written completely is removed.
func (w *Writer) write(data []byte) error {
	b := binary.LittleEndian.AppendUint64(w.buf[:0], uint64(len(data)))
	b = binary.LittleEndian.AppendUint32(b, mask(b))
	b = append(b, data...)
	w.buf = binary.LittleEndian.AppendUint32(b, mask(data))
	if _, err := w.f.WriteAt(w.buf, w.end); err != nil {
		return errors.Join(err, w.f.Truncate(w.end))
	}
	w.end += int64(len(w.buf))
	return nil
}

// Close closes the file.
func (w *Writer) Close() error { return w.f.Close() }
