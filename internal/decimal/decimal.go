// Package decimal reads decimal numbers. Go's parsers also accept spellings that most people would
// consider typing errors: they read 1_0 as 10, 010 as 8 and 0x1p4 as 16.
package decimal

import (
	"errors"
	"strconv"
	"strings"
)

// CheckFloat rejects spellings of numbers that are valid only in Go source. It does not check
// that s is a number; the parser does.
func CheckFloat(s string) error {
	if strings.ContainsAny(s, "_xXpP") {
		return errors.New("a plain decimal number is needed, such as 10 or 3e-4")
	}
	return nil
}

// CheckInt does the same as CheckFloat for integers.
func CheckInt(s string) error {
	digits := strings.TrimLeft(s, "+-")
	if strings.ContainsAny(digits, "_xXbBoO") || len(digits) > 1 && digits[0] == '0' {
		return errors.New("a plain decimal number is needed, such as 10")
	}
	return nil
}

// Float does the same as strconv.ParseFloat, for decimal numbers only.
func Float(s string) (float64, error) {
	if err := CheckFloat(s); err != nil {
		return 0, err
	}
	return strconv.ParseFloat(s, 64)
}
