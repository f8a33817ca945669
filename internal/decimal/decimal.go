// Package decimal reads numbers as people write them. Go's parsers also take what
// is a typing error to everybody else: 1_0 is 10 to them, 010 is 8 and 0x1p4 is 16.
package decimal

import (
	"errors"
	"strconv"
	"strings"
)

// CheckFloat returns an error for forms of a number that only Go's source has.
// Whether it is a number at all is for the parser to say.
func CheckFloat(s string) error {
	if strings.ContainsAny(s, "_xXpP") {
		return errors.New("a plain decimal number is needed, such as 10 or 3e-4")
	}
	return nil
}

// CheckInt is CheckFloat for whole numbers.
func CheckInt(s string) error {
	digits := strings.TrimLeft(s, "+-")
	if strings.ContainsAny(digits, "_xXbBoO") || len(digits) > 1 && digits[0] == '0' {
		return errors.New("a plain decimal number is needed, such as 10")
	}
	return nil
}

// Float is strconv.ParseFloat of decimal numbers.
func Float(s string) (float64, error) {
	if err := CheckFloat(s); err != nil {
		return 0, err
	}
	return strconv.ParseFloat(s, 64)
}
