--[[
slurm-resilience: an sbatch whose comment begins with the word "resilient" appends to its output and is warned by SIGUSR2
before its time limit, unless its own options say otherwise.  SLURM_RESILIENT=1 in the environment is the same as that
comment, for users who want it for all their jobs.  Nothing else is touched; an error in here lets the command go on.

Put it beside slurm.conf as cli_filter.lua, with CliFilterPlugins=lua.  A site's own goes on working as
cli_filter_site.lua in the same folder.
]]

local folder = (debug.getinfo(1, "S").source:match("^@(.*/)")) or "/etc/slurm/"
slurm_cli_setup_defaults, slurm_cli_pre_submit, slurm_cli_post_submit = nil, nil, nil
local file = io.open(folder .. "cli_filter_site.lua", "r")
if file then
  file:close()
  dofile(folder .. "cli_filter_site.lua")
end
local site_defaults, site_pre, site_post = slurm_cli_setup_defaults, slurm_cli_pre_submit, slurm_cli_post_submit

local LEAD_S = 90 -- enough to save and to requeue

local function set(value)
  -- An unset --signal reads 0@0.  Tried on 22.05.
  return type(value) == "string" and value ~= "" and value ~= "unset" and value ~= "(null)" and not value:match("^0@%d+$")
end

-- Seconds of a time limit as Slurm writes it (D-HH:MM:SS, HH:MM:SS, MM:SS, minutes); nil for none.
local function seconds(text)
  if not set(text) then return nil end
  local days, rest = text:match("^(%d+)%-(.+)$")
  local parts = {}
  for part in (rest or text):gmatch("%d+") do parts[#parts + 1] = tonumber(part) end
  if #parts == 0 then return nil end
  if days then return tonumber(days) * 86400 + parts[1] * 3600 + (parts[2] or 0) * 60 + (parts[3] or 0) end
  if #parts == 3 then return parts[1] * 3600 + parts[2] * 60 + parts[3] end
  return parts[1] * 60 + (parts[2] or 0)
end

local function prepare(options)
  if options["type"] ~= "sbatch" then
    return nil
  end
  local asked, comment = os.getenv("SLURM_RESILIENT"), options["comment"]
  local says = set(comment) and comment:match("^resilient%f[^%w_]") ~= nil
  if asked and asked ~= "" and asked ~= "0" and not says then
    options["comment"] = set(comment) and "resilient " .. comment or "resilient"
    says = true
  end
  if not says then
    return nil
  end
  local limit = seconds(options["time"])
  if not set(options["open-mode"]) then
    options["open-mode"] = "append"
  end
  if not set(options["signal"]) then
    options["signal"] = string.format("USR2@%d", limit and math.min(LEAD_S, math.floor(limit / 2)) or LEAD_S)
    return nil
  end
  local lead = tonumber(options["signal"]:match("@(%d+)$"))
  if lead and limit and lead >= limit then
    return string.format("--signal wants its warning %d s before the end of %d s: make the lead shorter", lead, limit)
  end
end

function slurm_cli_setup_defaults(options, early)
  return site_defaults and site_defaults(options, early) or slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  if site_pre then
    local answer = site_pre(options, offset)
    if answer ~= slurm.SUCCESS then
      return answer
    end
  end
  local worked, sentence = pcall(prepare, options)
  if not worked then
    slurm.log_debug("slurm-resilience: cli_filter.lua: %s", tostring(sentence))
  elseif sentence then
    slurm.log_error("slurm-resilience: %s", sentence)
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
  return site_post and site_post(offset, job, step) or slurm.SUCCESS
end

return slurm.SUCCESS
